"""The tokenise run: plan, tasks, the way of records through a task, accounts, publication."""
