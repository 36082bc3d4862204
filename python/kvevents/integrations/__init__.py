"""What plugs this package into others. Each is imported only by the program that it plugs into."""
