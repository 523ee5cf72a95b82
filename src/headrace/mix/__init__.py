"""Who is next: pure arithmetic over row counts, weights and tokens.

deal        which rows of a source a lane reads in an epoch, and in which order
interleave  which source gives a lane its next block
"""

from headrace.mix.deal import Deal, Span
from headrace.mix.interleave import LaneMix, fixed_point, lane_weight_factors, starting_credits

__all__ = ["Deal", "LaneMix", "Span", "fixed_point", "lane_weight_factors", "starting_credits"]
