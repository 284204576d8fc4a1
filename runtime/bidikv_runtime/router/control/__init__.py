"""Where the engines are and what they report: everything beside the requests' own way."""
