"""HTTP service for a trained network and an optional index: `front` answers, `replica` computes, `service` starts and ends both."""
