"""The state that routes share: engine client, tenants, admission of requests, logs and traces."""
