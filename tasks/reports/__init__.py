"""Reports of comparisons: files for DVC and pages for readers."""
