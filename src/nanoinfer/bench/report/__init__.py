"""The report of `nanoinfer bench`: `page.write_report`."""
