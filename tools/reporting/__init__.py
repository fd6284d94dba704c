"""Read measurements, draw pictures and write the page for tools/report.py."""
