"""Load, measure, compare, tune: proof on the machine at hand."""
