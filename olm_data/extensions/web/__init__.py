"""Pages of the web: HTML files, and WARC archives of what a crawl got."""
