"""What users need to test their own trainers and loaders.

assert_exact_resume   resume at every k, into a fresh object, in a chain, order compared
kill_sweep            SIGKILL a real job at many moments, continue it, see that it ends
"""

from headrace.testing.kill import KillSweep, kill_sweep
from headrace.testing.resume import ResumeReport, assert_exact_resume, first_difference, frozen

__all__ = ["KillSweep", "ResumeReport", "assert_exact_resume", "first_difference", "frozen", "kill_sweep"]
