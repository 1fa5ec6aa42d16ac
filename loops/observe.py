"""Why a step overflowed, what would help, and what a run recorded; `scaler.observe` has what needs no loop."""

from loops.diagnose.explain.at_hand import explain_batch as explain_batch
from loops.diagnose.explain.cure import cure as cure
from loops.diagnose.explain.explain import explain as explain
from loops.diagnose.explain.explanation import Explanation as Explanation
from loops.diagnose.find_scale import FoundScale as FoundScale
from loops.diagnose.find_scale import LayerFormat as LayerFormat
from loops.diagnose.find_scale import find_scale as find_scale
from loops.diagnose.graph.census import Census as Census
from loops.diagnose.graph.census import Row as Row
from loops.diagnose.graph.census import census as census
from loops.diagnose.lint import lint as lint
from loops.diagnose.lint.subject import Finding as Finding
from loops.diagnose.verify import Change as Change
from loops.diagnose.verify import Verification as Verification
from loops.diagnose.verify import verify as verify
from loops.record.forecast import Alarm as Alarm
from loops.record.forecast import Evidence as Evidence
from loops.record.forecast import forecast as forecast
from loops.record.trace import TraceTables as TraceTables
from loops.record.trace import read as read
from loops.record.trace.visit_columns import noise_scale as noise_scale
from loops.replay import Intervals as Intervals
from loops.replay import Replay as Replay
from loops.replay import Replayed as Replayed
from loops.replay import replay as replay
from loops.replay.tune import Tuned as Tuned
from loops.replay.tune import tune as tune
from loops.views.compare import Comparison as Comparison
from loops.views.compare import compare as compare
from loops.views.report import write_report as report

__all__ = [
    "Alarm",
    "Census",
    "Change",
    "Comparison",
    "Evidence",
    "Explanation",
    "Finding",
    "FoundScale",
    "Intervals",
    "LayerFormat",
    "Replay",
    "Replayed",
    "Row",
    "TraceTables",
    "Tuned",
    "Verification",
    "census",
    "compare",
    "cure",
    "explain",
    "explain_batch",
    "find_scale",
    "forecast",
    "lint",
    "noise_scale",
    "read",
    "replay",
    "report",
    "tune",
    "verify",
]
