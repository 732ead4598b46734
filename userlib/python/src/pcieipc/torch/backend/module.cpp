// SPDX-License-Identifier: MIT OR Apache-2.0
// The backend "pcie" of torch.distributed: a thin c10d::Backend over the C interface of pcieipc.
//
// Collectives of a group are made by one thread of the group, in the order in which they were asked for; that thread never needs the
// interpreter's lock, except to make an exception. Messages between two ranks (send, recv) may be asked for in any order, so they are
// matched first, over a socket between each pair of ranks, and then travel through rings of their own for each direction.
//
// Where a group spans hosts, the Python side passes the group's outer backend (gloo), and all-reduce is done in three steps: reduce-scatter
// inside the host, all-reduce of the shards between hosts, all-gather inside the host. Everything else is the outer backend's.

#include "backend.h"

using namespace pcieipc_torch;

PYBIND11_MODULE(_backend, m) {
  m.doc() = "The C++ part of pcieipc.torch.";
  // Typed errors, wherever pybind11 meets them.
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::class_<PcieBackend, c10d::Backend, c10::intrusive_ptr<PcieBackend>>(m, "PcieBackend")
      .def(py::init([](int rank, int size, int64_t timeout_ms, int64_t meeting_timeout_ms, std::string directory, std::vector<int> local, uint32_t transport, int endpoint,
                       size_t ring_bytes, uint32_t algorithm, const c10::intrusive_ptr<c10d::Backend>& outer,
                       const c10::intrusive_ptr<c10d::Backend>& owners, int shards, uint32_t cuda_path, int lanes) {
             py::gil_scoped_release released;
             return c10::make_intrusive<PcieBackend>(Settings{rank, size, milliseconds(timeout_ms), milliseconds(meeting_timeout_ms), std::move(directory), std::move(local), transport,
                                                              endpoint, ring_bytes, algorithm, outer, owners, shards, cuda_path, lanes});
           }),
           py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("timeout_ms"), py::arg("meeting_timeout_ms"), py::arg("directory"), py::arg("local"), py::arg("transport"),
           py::arg("endpoint"), py::arg("ring_bytes"), py::arg("algorithm"), py::arg("outer"), py::arg("owners"), py::arg("shards"), py::arg("cuda_path"), py::arg("lanes"))
      .def("leave", &PcieBackend::leave)
      .def("abort_with", &PcieBackend::abort_with, py::call_guard<py::gil_scoped_release>())
      .def("check", &PcieBackend::check_group, py::call_guard<py::gil_scoped_release>())
      .def("survivors", &PcieBackend::survivors, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("host_ranks", &PcieBackend::host_ranks)
      .def_property_readonly("spans_hosts", &PcieBackend::spans_hosts);
  m.def("leave_all", &PcieBackend::leave_all);
  m.def("holds_endpoint", [] { return endpoints_held > 0; });
}
