"""Static memory placement: buffers with lifetimes in, offsets in one arena out.

    problem = read_problem(Path("A.csv"))
    placement = place(problem, "exact", time_limit_s=10)
    require_valid(problem, placement)
    placement.height, placement.bound, placement.is_optimal

See README.md here for the planners, what they reach, and the order to read the files in.
"""

from scheduler.placement.check import PlacementError, faults_of, require_valid
from scheduler.placement.chunked import chunked, in_chunks, rounding_cost
from scheduler.placement.convert import StepProblem, problem_from_plan, problem_from_trace
from scheduler.placement.exact import exact
from scheduler.placement.files import PlacementFileError, read_problem, write_problem
from scheduler.placement.greedy import best_fit, first_fit_by_size, melon, nntrainer
from scheduler.placement.problem import Buffer, Placement, Problem, lower_bound
from scheduler.placement.registry import place, planner_names
from scheduler.placement.search import search

__all__ = [
    "Buffer",
    "Problem",
    "Placement",
    "lower_bound",
    "place",
    "planner_names",
    "nntrainer",
    "melon",
    "first_fit_by_size",
    "best_fit",
    "search",
    "exact",
    "chunked",
    "in_chunks",
    "rounding_cost",
    "faults_of",
    "require_valid",
    "PlacementError",
    "read_problem",
    "write_problem",
    "PlacementFileError",
    "problem_from_trace",
    "problem_from_plan",
    "StepProblem",
]
