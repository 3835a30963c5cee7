"""Parts of commands of all packages: groups whose members load on use, and files for their examples."""
