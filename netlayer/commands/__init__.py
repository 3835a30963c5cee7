"""What commands of all packages are made of: groups whose members load on use, and the files that examples need."""
