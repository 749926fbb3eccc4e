"""Which row comes when: pure functions of the step, with no table of the dataset's size."""
