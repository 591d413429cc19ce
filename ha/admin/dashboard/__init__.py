"""The dashboard: web pages on the admin port. Of halog it imports only ha.admin; the node passes it a DashboardSource.

source.py     the interface to the node, and its data types
pages.py      routes and pages; login.py: the login form
acting.py     actions: forms and confirmations; operations.py: what each one does; forms.py: reads posted forms
live.py       the updates of the overview, shared by all viewers; drawing.py: the diagram of the cluster;
              peers.py: the names of its nodes
lag_chart.py  the chart of a group's lag
bodies.py     message bodies as text; formats.py: numbers and times
rendering.py  renders the templates (templates/)
assets.py     style sheets, scripts and images (static/), and the headers of all responses
"""
