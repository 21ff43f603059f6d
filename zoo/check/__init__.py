"""The contract suite: what every gate, mixer, FFN and router owes, whoever wrote it.

A *contract* (contract.py) is a sentence and a function that tries it on a *case* (cases.py, gates.py, ffns.py). A
*plan* (plan.py) says which contracts a part is held to on which cases; `zoo check` (run.py) and the tests of the zoo's
own parts go by the same plan.
"""

from zoo.check.contract import Broken, Contract, NotApplicable
from zoo.check.run import Verdict, check, find

__all__ = ["Broken", "Contract", "NotApplicable", "Verdict", "check", "find"]
