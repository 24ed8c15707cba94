"""Sockets between the processes of a run, and to servers; docs/security.md says who is admitted.

A FramedSocket sends whole packets with deadlines. An AcceptLimiter bounds what connections cost that have not shown a
run's token. A TcpRendezvous is what a group's members find each other by. An HttpClient asks a server, within bounds.
"""

from spec_processes.sockets.addresses import bind, format_address, opening, parse_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host, peer_errors
from spec_processes.sockets.http_client import HttpAnswer, HttpClient, check_draft_token, server_address
from spec_processes.sockets.peer_admission import AcceptLimiter, same_token
from spec_processes.sockets.rendezvous import TcpRendezvous

__all__ = [
    "AcceptLimiter",
    "FramedSocket",
    "HttpAnswer",
    "HttpClient",
    "TcpRendezvous",
    "bind",
    "check_draft_token",
    "detect_dead_host",
    "format_address",
    "opening",
    "parse_address",
    "peer_errors",
    "same_token",
    "server_address",
]
