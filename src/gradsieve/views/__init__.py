"""What people see of records: `gradsieve watch` and `gradsieve report`."""
