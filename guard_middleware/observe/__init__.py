"""What the guard tells: events for logs, metrics for dashboards."""
