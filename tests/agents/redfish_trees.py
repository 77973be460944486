"""Small Redfish trees: a coolant distribution unit, a power shelf, a PDU and a liquid-cooled chassis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.agents.redfish_tree import ROOT, Document, Tree, collection

OK = {"State": "Enabled", "Health": "OK"}
CDU = f"{ROOT}/ThermalEquipment/CDUs/C1"
CDU_CHASSIS = f"{ROOT}/Chassis/C1"
FLOW, SUPPLY_PRESSURE = f"{CDU_CHASSIS}/Sensors/SecondaryFlow", f"{CDU_CHASSIS}/Sensors/SecondarySupplyPressure"
LEAK = f"{CDU}/LeakDetection/LeakDetectors/Tray"
SHELF = f"{ROOT}/Chassis/Shelf1"
PDU = f"{ROOT}/PowerEquipment/RackPDUs/P1"
BLADE = f"{ROOT}/Chassis/Blade1"
UNITS = {"LiquidFlowLPM": "L/min", "PressurekPa": "kPa", "Temperature": "Cel", "Humidity": "%", "Power": "W"}
UNITS |= {"Voltage": "V", "Current": "A", "Rotational": "{rev}/min", "EnergykWh": "kW.h", "Frequency": "Hz"}


def document(path: str, kind: str, version: str, **fields: Any) -> Document:
    """A resource with the properties that all have."""
    name = path.rsplit("/", 1)[1]
    head = {
        "@odata.id": path,
        "@odata.type": f"#{kind}.v{version}.{kind}",
        "Id": name,
        "Name": name,
        "Status": dict(OK),
    }
    return head | fields


def link(path: str) -> Document:
    return {"@odata.id": path}


class Planting:
    """Collects the documents of a tree; a collection appears with its first member."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}

    def put(self, path: str, kind: str, version: str, **fields: Any) -> str:
        self.documents[path] = document(path, kind, version, **fields)
        return path

    def member(self, path: str, kind: str, version: str, **fields: Any) -> str:
        parent, _ = path.rsplit("/", 1)
        known = self.documents.setdefault(parent, collection(parent, kind, []))
        known["Members"].append(link(path))
        known["Members@odata.count"] += 1
        return self.put(path, kind, version, **fields)

    def sensor(self, chassis: str, name: str, kind: str, reading: float, **fields: Any) -> Document:
        """A Sensor resource; gives the excerpt that refers to it."""
        path = f"{chassis}/Sensors/{name}"
        self.member(path, "Sensor", "1_9_0", Reading=reading, ReadingType=kind, ReadingUnits=UNITS[kind], **fields)
        return {"DataSourceUri": path, "Reading": reading}

    def tree(self) -> Tree:
        return Tree.from_capture(self.documents)


def cdu() -> Tree:
    """A CDU with two pumps, a connector on each side, a filter, a reservoir and two leak detectors."""
    plant = Planting()
    parts = (
        "PrimaryCoolantConnectors",
        "SecondaryCoolantConnectors",
        "Pumps",
        "Filters",
        "Reservoirs",
        "LeakDetection",
    )
    plant.put(f"{ROOT}/ThermalEquipment", "ThermalEquipment", "1_1_0", CDUs=link(f"{ROOT}/ThermalEquipment/CDUs"))
    about = {"EquipmentType": "CDU", "Manufacturer": "Northwater", "Model": "NW-300", "SerialNumber": "NW30-0017"}
    about["FirmwareVersion"] = "4.1.0"
    about |= {part: link(f"{CDU}/{part}") for part in (*parts, "EnvironmentMetrics")}
    about["Coolant"] = {"CoolantType": "Water", "SpecificHeatkJoulesPerKgK": 3.9, "DensityKgPerCubicMeter": 1020}
    plant.member(CDU, "CoolingUnit", "1_3_0", **about, Links={"Chassis": [link(CDU_CHASSIS)]})
    chassis = {"ChassisType": "Module", "Sensors": link(f"{CDU_CHASSIS}/Sensors")}
    plant.member(CDU_CHASSIS, "Chassis", "1_25_0", **chassis, AssetTag="", Links={"CoolingUnits": [link(CDU)]})
    for side, rated, supply, rise in (("Primary", 400, 24.0, 9.0), ("Secondary", 360, 32.0, 10.0)):
        _connector(plant, side, rated, supply, rise)
    for number, percent in (("1", 62.0), ("2", 61.0)):
        control = plant.member(
            f"{CDU_CHASSIS}/Controls/Pump{number}",
            "Control",
            "1_5_0",
            ControlType="Percent",
            SetPoint=60,
            AllowableMax=100,
        )
        speed = {"SetPoint": 60, "DataSourceUri": control, "ControlMode": "Automatic"}
        reading = {"Reading": percent, "SpeedRPM": percent * 60}
        plant.member(
            f"{CDU}/Pumps/{number}",
            "Pump",
            "1_2_0",
            PumpType="Liquid",
            PumpSpeedPercent=reading,
            SpeedControlPercent=speed,
            ServiceHours=1200.5,
        )
    plant.member(f"{CDU}/Filters/1", "Filter", "1_0_3", ServiceHours=900.0, RatedServiceHours=8000.0)
    plant.member(f"{CDU}/Reservoirs/1", "Reservoir", "1_0_2", FluidLevelStatus="OK", CapacityLiters=40)
    _environment(plant)
    _leaks(plant, f"{CDU}/LeakDetection", {"Tray": "Moisture", "Manifold": "Moisture"})
    return plant.tree()


def _connector(plant: Planting, side: str, rated: float, supply: float, rise: float) -> None:
    """One side of the CDU: flow, temperatures, pressures and the heat they carry."""

    def sensor(name: str, kind: str, reading: float) -> Document:
        return plant.sensor(CDU_CHASSIS, f"{side}{name}", kind, reading, SensingInterval="PT1S")

    flow = 0.9 * rated
    plant.member(
        f"{CDU}/{side}CoolantConnectors/1",
        "CoolantConnector",
        "1_3_0",
        CoolantConnectorType="Pair",
        RatedFlowLitersPerMinute=rated,
        RatedSupplyPressurekPa=400,
        FlowLitersPerMinute=sensor("Flow", "LiquidFlowLPM", flow),
        SupplyTemperatureCelsius=sensor("SupplyTemperature", "Temperature", supply),
        ReturnTemperatureCelsius=sensor("ReturnTemperature", "Temperature", supply + rise),
        DeltaTemperatureCelsius=sensor("DeltaTemperature", "Temperature", rise),
        SupplyPressurekPa=sensor("SupplyPressure", "PressurekPa", 320.0),
        ReturnPressurekPa=sensor("ReturnPressure", "PressurekPa", 180.0),
        DeltaPressurekPa=sensor("DeltaPressure", "PressurekPa", 140.0),
        HeatRemovedkW=sensor("Heat", "Power", round(flow * rise / 15.1, 2)),
    )


def _environment(plant: Planting) -> None:
    """The unit's own surroundings and what it draws."""
    temperature = plant.sensor(CDU_CHASSIS, "CabinetTemperature", "Temperature", 27.5)
    humidity = plant.sensor(CDU_CHASSIS, "CabinetHumidity", "Humidity", 41.0)
    power = plant.sensor(CDU_CHASSIS, "CabinetPower", "Power", 2150.0)
    about = {"TemperatureCelsius": temperature, "HumidityPercent": humidity, "PowerWatts": power}
    plant.put(f"{CDU}/EnvironmentMetrics", "EnvironmentMetrics", "1_3_2", **about)


def _leaks(plant: Planting, base: str, detectors: dict[str, str]) -> None:
    """LeakDetection with its detectors, as resources and as a group of excerpts."""
    found = []
    for name, kind in detectors.items():
        about = {"LeakDetectorType": kind, "DetectorState": "OK", "PhysicalContext": "Chassis"}
        path = plant.member(f"{base}/LeakDetectors/{name}", "LeakDetector", "1_1_0", **about)
        found.append({"DataSourceUri": path, "DeviceName": name, "DetectorState": "OK"})
    group = {"GroupName": "All detectors", "Status": dict(OK), "Detectors": found}
    detectors_link = link(f"{base}/LeakDetectors")
    plant.put(base, "LeakDetection", "1_0_1", LeakDetectors=detectors_link, LeakDetectorGroups=[group])


def shelf() -> Tree:
    """A power shelf with three supplies, of which one more than is needed, and a battery unit."""
    plant = Planting()
    subsystem = f"{SHELF}/PowerSubsystem"
    about = {"ChassisType": "Shelf", "Manufacturer": "Coldspark", "Model": "PS-33", "SerialNumber": "CS33-0042"}
    links = {"PowerSubsystem": link(subsystem), "Sensors": link(f"{SHELF}/Sensors")}
    links["EnvironmentMetrics"] = link(f"{SHELF}/EnvironmentMetrics")
    plant.member(SHELF, "Chassis", "1_25_0", **about, **links, AssetTag="")
    supplies = [f"{subsystem}/PowerSupplies/{number}" for number in range(1, 4)]
    redundancy = {"RedundancyType": "NPlusM", "MinNeededInGroup": 2, "MaxSupportedInGroup": 3, "Status": dict(OK)}
    redundancy["RedundancyGroup"] = [link(path) for path in supplies]
    allocation = {"AllocatedWatts": 6600, "RequestedWatts": 8000}
    plant.put(
        subsystem,
        "PowerSubsystem",
        "1_1_2",
        CapacityWatts=16500,
        Allocation=allocation,
        PowerSupplies=link(f"{subsystem}/PowerSupplies"),
        Batteries=link(f"{subsystem}/Batteries"),
        PowerSupplyRedundancy=[redundancy],
    )
    for path in supplies:
        _supply(plant, path)
    power = plant.sensor(SHELF, "TotalPower", "Power", 6300.0)
    energy = plant.sensor(SHELF, "TotalEnergy", "EnergykWh", 15_321.4)
    limit = {"SetPoint": 16000, "ControlMode": "Disabled"}
    about = {"PowerWatts": power, "EnergykWh": energy, "PowerLimitWatts": limit, "PowerLoadPercent": {"Reading": 38.2}}
    plant.put(f"{SHELF}/EnvironmentMetrics", "EnvironmentMetrics", "1_3_2", **about)
    battery = {"ChargeState": "Idle", "CapacityActualWattHours": 410.0, "MaxDischargeRateAmps": 80}
    battery |= {"StateOfHealthPercent": {"Reading": 96.0}, "Metrics": link(f"{subsystem}/Batteries/1/Metrics")}
    plant.member(f"{subsystem}/Batteries/1", "Battery", "1_3_0", **battery)
    metrics = {"ChargePercent": {"Reading": 99.0}, "StoredEnergyWattHours": {"Reading": 405.0}, "DischargeCycles": 11.0}
    plant.put(f"{subsystem}/Batteries/1/Metrics", "BatteryMetrics", "1_0_2", **metrics)
    return plant.tree()


def _supply(plant: Planting, path: str) -> None:
    """One power supply with its metrics and a rail."""
    number = path.rsplit("/", 1)[1]
    about = {"Manufacturer": "Coldspark", "SerialNumber": f"CSP-{number}", "FirmwareVersion": "1.7"}
    about |= {
        "PowerCapacityWatts": 5500,
        "LineInputStatus": "Normal",
        "EfficiencyRatings": [{"EfficiencyPercent": 97.2}],
    }
    plant.member(path, "PowerSupply", "1_5_2", **about, Metrics=link(f"{path}/Metrics"))

    def sensor(name: str, kind: str, reading: float) -> Document:
        return plant.sensor(SHELF, f"Supply{number}{name}", kind, reading)

    plant.put(
        f"{path}/Metrics",
        "PowerSupplyMetrics",
        "1_1_1",
        InputVoltage=sensor("InputVoltage", "Voltage", 239.4),
        InputCurrentAmps=sensor("InputCurrent", "Current", 9.2),
        InputPowerWatts=sensor("InputPower", "Power", 2180.0),
        OutputPowerWatts=sensor("OutputPower", "Power", 2100.0),
        RailVoltage=[sensor("RailVoltage", "Voltage", 50.1)],
        RailCurrentAmps=[sensor("RailCurrent", "Current", 41.9)],
        RailPowerWatts=[sensor("RailPower", "Power", 2100.0)],
        TemperatureCelsius=sensor("Temperature", "Temperature", 44.0),
        FrequencyHz=sensor("Frequency", "Frequency", 50.0),
    )


def pdu() -> Tree:
    """A rack PDU with a main, a branch and two outlets."""
    plant = Planting()
    base = f"{ROOT}/PowerEquipment"
    plant.put(base, "PowerEquipment", "1_2_2", RackPDUs=link(f"{base}/RackPDUs"))
    parts = {name: link(f"{PDU}/{name}") for name in ("Mains", "Branches", "Outlets", "Metrics", "Sensors")}
    plant.member(PDU, "PowerDistribution", "1_3_2", EquipmentType="RackPDU", SerialNumber="PD-0009", **parts)
    power = plant.sensor(PDU, "Power", "Power", 9120.0)
    energy = plant.sensor(PDU, "Energy", "EnergykWh", 88_123.0)
    plant.put(f"{PDU}/Metrics", "PowerDistributionMetrics", "1_3_1", PowerWatts=power, EnergykWh=energy)
    for kind, name, amperes in (("Mains", "AC1", 22.0), ("Branches", "A", 21.5)):
        reading = plant.sensor(PDU, f"{name}Current", "Current", amperes)
        about = {
            "BreakerState": "Normal",
            "RatedCurrentAmps": 32,
            "CurrentAmps": reading,
            "CircuitType": kind.rstrip("s"),
        }
        plant.member(f"{PDU}/{kind}/{name}", "Circuit", "1_7_1", **about, PhaseWiringType="FourWire")
    for number, watts in (("1", 4500.0), ("2", 4620.0)):
        about = {"PowerState": "On", "RatedCurrentAmps": 16, "OutletType": "IEC_60320_C19"}
        reading = plant.sensor(PDU, f"Outlet{number}Power", "Power", watts)
        plant.member(f"{PDU}/Outlets/{number}", "Outlet", "1_4_4", **about, PowerWatts=reading)
    return plant.tree()


def chassis() -> Tree:
    """A liquid-cooled node: loop inlet and outlet, leak ropes, power and temperatures."""
    plant = Planting()
    thermal = f"{BLADE}/ThermalSubsystem"
    links = {"ThermalSubsystem": link(thermal), "Sensors": link(f"{BLADE}/Sensors")}
    links["EnvironmentMetrics"] = link(f"{BLADE}/EnvironmentMetrics")
    about = {"ChassisType": "Blade", "Manufacturer": "Coldspark", "Model": "LC-8", "SerialNumber": "LC8-0101"}
    plant.member(BLADE, "Chassis", "1_25_0", **about, **links, AssetTag="")
    plant.put(
        thermal,
        "ThermalSubsystem",
        "1_3_2",
        CoolantConnectors=link(f"{thermal}/CoolantConnectors"),
        LeakDetection=link(f"{thermal}/LeakDetection"),
        ThermalMetrics=link(f"{thermal}/ThermalMetrics"),
    )
    supply = plant.sensor(BLADE, "Inlet", "Temperature", 31.5)
    back = plant.sensor(BLADE, "Outlet", "Temperature", 41.0)
    about = {"CoolantConnectorType": "Pair", "SupplyTemperatureCelsius": supply, "ReturnTemperatureCelsius": back}
    about["FlowLitersPerMinute"] = plant.sensor(BLADE, "Flow", "LiquidFlowLPM", 9.5)
    plant.member(f"{thermal}/CoolantConnectors/1", "CoolantConnector", "1_3_0", RatedFlowLitersPerMinute=10, **about)
    _leaks(plant, f"{thermal}/LeakDetection", {"Rope1": "Moisture", "Rope2": "Moisture"})
    plant.put(f"{thermal}/ThermalMetrics", "ThermalMetrics", "1_3_2", TemperatureSummaryCelsius={"Intake": supply})
    power = plant.sensor(BLADE, "Power", "Power", 7100.0)
    plant.put(f"{BLADE}/EnvironmentMetrics", "EnvironmentMetrics", "1_3_2", PowerWatts=power)
    return plant.tree()


TREES: dict[str, Callable[[], Tree]] = {"cdu": cdu, "shelf": shelf, "pdu": pdu, "chassis": chassis}
