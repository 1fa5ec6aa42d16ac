"""Two recorded runs, tensor by tensor: where they part, by how much, and which is closer to float32."""

from loops.compared.compare import compare as compare
from loops.compared.result import Comparison as Comparison
from loops.compared.result import Row as Row
