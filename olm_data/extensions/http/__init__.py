"""Read-only files of web servers, `http://` and `https://`."""
