"""Opacus' own tests, run on fastclip: `python -m tests.conformance` (or `make conformance`).

Nothing of Opacus' tests is copied. Their classes are imported from the installed wheel and subclassed;
while a case runs, names in its module stand for ours (`PrivacyEngine` for `FastPrivacyEngine`).

| file | what is in it |
|---|---|
| `substitution.py` | loads Opacus' test modules and makes the subclasses, one a mode |
| `engines.py`, `parts.py` | what takes the place of Opacus' engine, and of its parts |
| `per_sample.py` | norms and clipped sums against one sample at a time, for every layer's case |
| `torchvision_stub.py` | a stand-in for what the tests take from torchvision |
| `not_applicable.py` | the cases that cannot apply, each with its reason; they must fail |
| `subset.py` | the cases that `make test` runs, too |

Not run: what needs GPUs or several processes (mixed_precision_test, multidevice_optimizer_test,
distributed_poisson_test, multigpu_*, ddp_hook_check), and tests of Opacus' parts that the engine does
not touch (dp_layers, its ghost clipping, prv_accountant, per_sample_gradients_utils_test).
"""
