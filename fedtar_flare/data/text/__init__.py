"""Report text: cleaning as the literature does it, sections, and identifiers that were left behind."""
