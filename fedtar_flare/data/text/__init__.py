"""Report text: cleaning as in the literature, sections, and identifiers left behind."""
