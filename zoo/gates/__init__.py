"""Gates: four kinds, each a contract and a registry; one gate a file.

| kind | acts on | computes | applied by |
|---|---|---|---|
| decay | the state transition | `Decay(log_decay, step)` | the op |
| write | the amount written | `beta` | the op |
| output | a tensor inside the layer | `score` | the mixer, which multiplies or adds |
| branch | parallel branches | `weights` | the mixer, which sums |
"""

from zoo.gates._gate import Gate, force, named_gates, reading, record

__all__ = ["Gate", "force", "named_gates", "reading", "record"]
