"""What an attacker can be shown to learn: lower bounds on epsilon, beside the one that is claimed.

`python -m fastclip.audit` audits this installation; `CanaryScoreAuditor` any scores of canaries.
"""

from fastclip.audit.auditor import CanaryScoreAuditor

__all__ = ["CanaryScoreAuditor"]
