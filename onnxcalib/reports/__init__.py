"""What people read: tables."""
