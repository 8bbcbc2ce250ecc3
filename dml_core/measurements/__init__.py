"""What a table shows of a finished run beyond the evaluator's scores: centres, distances, gradients, maps, times; one file each."""
