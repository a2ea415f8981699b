"""The earlier place of :mod:`dualkv.integrations.transformers.experts`."""

from dualkv.integrations.transformers.experts import load_balancing_loss as load_balancing_loss
from dualkv.integrations.transformers.experts import replay_routes as replay_routes
from dualkv.integrations.transformers.experts import rollouts_of_rows as rollouts_of_rows
from dualkv.integrations.transformers.experts import routes_of_rows as routes_of_rows
