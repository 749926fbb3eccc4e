"""The processes of a run: how they meet, agree, wait for each other and stop."""
