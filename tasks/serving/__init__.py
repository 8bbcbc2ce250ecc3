"""A trained network, and an index where there is one, behind HTTP: `front` answers, `replica` computes, `service` starts and ends both."""
