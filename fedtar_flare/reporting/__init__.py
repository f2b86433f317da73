"""From the run record to what people read: page, closing box, model card."""
