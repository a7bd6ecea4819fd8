"""Hold any kernel, in any language, to the reference: ``check_op`` and ``check_module``.

``myllm verify`` is the same from the command line; ``README.md`` here has the story.
"""

from accel.verify.check import VerificationError, check_case, check_module, check_op
from accel.verify.report import Report
from accel.verify.subject import SubjectError

__all__ = [
    "Report",
    "SubjectError",
    "VerificationError",
    "check_case",
    "check_module",
    "check_op",
]
