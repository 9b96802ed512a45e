"""kvlab's verdict inside other people's servers. Each module needs the server that it is named after."""
