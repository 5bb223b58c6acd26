"""Reports: what a run found, as pages and pictures that people look at."""
