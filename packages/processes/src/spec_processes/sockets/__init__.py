"""This package has the sockets between the processes of a run, and to HTTP servers.

A FramedSocket sends packets, with deadlines. An AcceptLimiter bounds the cost of connections that have not
sent the run's secret token. The members of a group find each other by a TcpRendezvous. An HttpClient sends
requests to a server, with limits on time and size. docs/security.md describes the authentication.
"""

from spec_processes.sockets.addresses import bind, format_address, opening, parse_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host, peer_errors
from spec_processes.sockets.http_client import HttpAnswer, HttpClient, check_secret, server_address
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token
from spec_processes.sockets.rendezvous import TcpRendezvous

__all__ = [
    "AcceptLimiter",
    "FramedSocket",
    "HttpAnswer",
    "HttpClient",
    "TcpRendezvous",
    "bind",
    "check_secret",
    "detect_dead_host",
    "format_address",
    "opening",
    "parse_address",
    "peer_errors",
    "same_token",
    "server_address",
]
