"""Who reads the weights: runs the cells of a matrix, keeps records, computes statistics and writes reports."""
