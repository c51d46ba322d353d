"""Lower bounds on epsilon, to compare with the epsilon that the engine claims.

`python -m fastclip.audit` audits this installation. `mix_in` puts canaries into your own run.
`CanaryScoreAuditor` accepts any scores of canaries.
"""

from fastclip.audit.bounds import CanaryScoreAuditor
from fastclip.audit.own_report import Report
from fastclip.audit.own_run import OwnRun, mix_in

__all__ = ["CanaryScoreAuditor", "OwnRun", "Report", "mix_in"]
