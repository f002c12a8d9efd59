"""What other projects import: `octavo.testing`. The server itself lives in app and core, and is talked to over HTTP."""
