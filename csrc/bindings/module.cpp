// Makes the extension module: one bind_<concept> for each part that Python sees, in the order of their dependencies.
#include <pybind11/pybind11.h>

namespace noria {

void bind_base(pybind11::module_& m);
void bind_testing(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_choices(pybind11::module_& m);
void bind_store(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_torch_bridge(pybind11::module_& m);

}  // namespace noria

PYBIND11_MODULE(_C, m) {
  m.doc() = "noria's engine; private to the noria package";
  noria::bind_base(m);
  noria::bind_testing(m);
  noria::bind_device(m);
  noria::bind_plan(m);
  noria::bind_choices(m);
  noria::bind_store(m);
  noria::bind_optim(m);
  noria::bind_comm(m);
  noria::bind_torch_bridge(m);
}
