"""The comparison of `params.yaml`: its runs, and the settings that change them."""
