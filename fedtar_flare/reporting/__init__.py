"""From the run record to what people read: page, closing table, model card."""
