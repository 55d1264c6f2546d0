"""A step's collectives on paper: time on the wire, exposed and hidden, for 8 to 100,000 ranks."""

from graphpasses.graph.traffic import Event as Event
from graphpasses.graph.traffic import Traffic as Traffic
from graphpasses.graph.traffic import Transfer as Transfer
from graphpasses.scale.speeds import Algorithm as Algorithm
from graphpasses.scale.speeds import Speeds as Speeds
from graphpasses.scale.speeds import read_speeds as read_speeds
from graphpasses.scale.step_time import StepTime as StepTime
from graphpasses.scale.step_time import Wire as Wire
from graphpasses.scale.step_time import step_time as step_time
from graphpasses.scale.step_time import wire_seconds as wire_seconds
