"""`/link?entity=`: both ends of a link, its optics, errors as rates, history and neighbours."""

from dashboards.link.page import page

__all__ = ["page"]
