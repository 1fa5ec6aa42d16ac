"""Why a step overflowed, what would help, and what a run recorded: what `scaler.observe` cannot do without a loop."""

from loops.autopsy.cure import cure as cure
from loops.autopsy.explain import explain as explain
from loops.autopsy.explanation import Explanation as Explanation
from loops.census import Census as Census
from loops.census import Row as Row
from loops.census import census as census
from loops.compared import Comparison as Comparison
from loops.compared import compare as compare
from loops.find_scale import FoundScale as FoundScale
from loops.find_scale import LayerFormat as LayerFormat
from loops.find_scale import find_scale as find_scale
from loops.forecast import Alarm as Alarm
from loops.forecast import forecast as forecast
from loops.lint.finding import Finding as Finding
from loops.lint.look import lint as lint
from loops.replay import Replay as Replay
from loops.replay import Replayed as Replayed
from loops.replay import replay as replay
from loops.replay.tune import Tuned as Tuned
from loops.replay.tune import tune as tune
from loops.report import write_report as report
from loops.trace import TraceTables as TraceTables
from loops.trace import read as read
from loops.verify import Change as Change
from loops.verify import Verification as Verification
from loops.verify import verify as verify

__all__ = [
    "Alarm",
    "Census",
    "Change",
    "Comparison",
    "Explanation",
    "Finding",
    "FoundScale",
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
    "find_scale",
    "forecast",
    "lint",
    "read",
    "replay",
    "report",
    "tune",
    "verify",
]
