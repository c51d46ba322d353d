"""What an attacker can be shown to learn: lower bounds on epsilon, beside the one that is claimed.

`python -m fastclip.audit` audits this installation; `mix_in` puts canaries into a run of your own;
`CanaryScoreAuditor` takes any scores of canaries.
"""

from fastclip.audit.bounds import CanaryScoreAuditor
from fastclip.audit.own_report import Report
from fastclip.audit.own_run import OwnRun, mix_in

__all__ = ["CanaryScoreAuditor", "OwnRun", "Report", "mix_in"]
