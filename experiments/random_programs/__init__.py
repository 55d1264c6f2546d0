"""Random training programs: eager, captured and compiled steps, compared bit by bit."""
