"""Two recorded runs, tensor by tensor: where they part, by how much, and which is closer to float32."""

from loops.views.compare.compare import compare as compare
from loops.views.compare.result import Comparison as Comparison
from loops.views.compare.result import Row as Row
