"""The rule itself: values in, values out. Nothing here touches the world."""
