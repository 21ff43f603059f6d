import math

import torch

from zoo.metrics import BitsPerByte, Loss, Perplexity


def test_every_target_weighs_the_same() -> None:
    loss = Loss()
    loss.update(torch.tensor(30.0), 10)
    loss.update(torch.tensor(5.0), torch.tensor(1))
    torch.testing.assert_close(loss.compute(), torch.tensor(35 / 11))  # the mean of the means would be 4


def test_perplexity_is_the_exponential_of_the_mean_of_all() -> None:
    perplexity = Perplexity()
    perplexity.update(torch.tensor(3 * math.log(4)), 3)
    perplexity.update(torch.tensor(math.log(64)), 1)
    torch.testing.assert_close(perplexity.compute(), torch.tensor(4**1.5))


def test_bits_per_byte_do_not_depend_on_the_tokens() -> None:
    bits = BitsPerByte()
    bits.update(torch.tensor(8 * math.log(2)), 4)
    torch.testing.assert_close(bits.compute(), torch.tensor(2.0))


def test_reset_forgets() -> None:
    loss = Loss()
    loss.update(torch.tensor(30.0), 10)
    loss.reset()
    loss.update(torch.tensor(2.0), 1)
    assert loss.compute().item() == 2


def test_two_processes_add_their_sums() -> None:
    """What torchmetrics does with the gathered states of two processes."""
    one, two = Loss(), Loss()
    one.update(torch.tensor(30.0), 10)
    two.update(torch.tensor(5.0), 1)
    for name, reduce in one._reductions.items():
        setattr(one, name, reduce(torch.stack([getattr(one, name), getattr(two, name)])))
    torch.testing.assert_close(one.compute(), torch.tensor(35 / 11))


def test_a_cast_model_does_not_cast_the_sums() -> None:
    loss = torch.nn.ModuleDict({"loss": Loss()}).to(torch.bfloat16)["loss"]
    for _ in range(1000):
        loss.update(torch.tensor(1.001), 1)
    torch.testing.assert_close(loss.compute(), torch.tensor(1.001), rtol=1e-5, atol=0.0)
