"""Redfish (DMTF DSP0266): what the BMCs of chassis, power shelves, PDUs and coolant units tell, within their budget.

client, session: HTTP. schedule: what is asked next. catalogue: which resource leads to which. power, psu, coolant,
leaks, cdu, environment, older: documents -> rows, pure. sse: the stream of events. watch: one BMC, all together.
"""
