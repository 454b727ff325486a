// CPU kernels in the place of CUDA's: on the pretended device, whose memory is the host's, numbers are real.
//
// Each operator of aten that has a kernel for CUDA and one for the CPU gets the second one for both. Its arguments are
// tensors on the CPU that share the memory of the given ones, so that what an operator writes arrives, also where its
// schema does not say that it writes (running statistics of a BatchNorm).
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

// Kernels of CUDA that launch nothing, or that the host waits in: they are to run as they are.
const std::vector<std::string> KEPT = {
    "aten::empty", "aten::empty_strided", "aten::set_", "aten::resize_", "aten::_local_scalar_dense",
    "aten::_pin_memory", "aten::is_pinned", "aten::record_stream", "aten::is_set_to", "aten::copy_",
    "aten::_copy_from_and_resize", "aten::_resize_output_",
};

at::Tensor on_host(const at::Tensor& given) {
    if (!given.defined() || !given.is_cuda()) return given;
    // An operator may give it another size: its storage then takes other memory, of the CPU.
    size_t bytes = at::detail::computeStorageNbytes(given.sizes(), given.strides(), given.itemsize());
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(given.data_ptr(), at::kCPU),
                         c10::GetCPUAllocator(), /*resizable=*/true);
    auto shared = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), given.dtype());
    shared.unsafeGetTensorImpl()->set_sizes_and_strides(given.sizes(), given.strides());
    if (given.is_conj()) shared._set_conj(true);
    if (given.is_neg()) shared._set_neg(true);
    return shared;
}

// Operators of CUDA that take indices on the host too.
bool takes_from_host(const std::string& name) { return name.find("index") != std::string::npos; }

// A call in progress: the given tensors, and their twins on the CPU.
struct Call {
    std::vector<at::Tensor> given, twins;
    c10::optional<c10::Device> device;
    const std::string& name;

    at::Tensor twin(const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) {  // CUDA's kernels take numbers of the host
            TORCH_CHECK(tensor.dim() == 0 || tensor.numel() == 0 || takes_from_host(name), name,
                        " mixes tensors of ", tensor.device(), " and a GPU");
            return tensor;
        }
        if (!device) device = tensor.device();
        TORCH_CHECK(*device == tensor.device(), name, " mixes tensors of ", *device, " and ", tensor.device());
        given.push_back(tensor);
        twins.push_back(on_host(tensor));
        return twins.back();
    }

    IValue argument(const IValue& value) {
        if (value.isTensor()) return twin(value.toTensor());
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor each : value.toTensorVector()) list.push_back(twin(each));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<c10::optional<at::Tensor>> list;
            for (c10::optional<at::Tensor> each : value.toOptionalTensorVector())
                list.push_back(each ? c10::make_optional(twin(*each)) : each);
            return list;
        }
        if (value.isDevice() && value.toDevice().is_cuda()) {
            device = value.toDevice();
            return c10::Device(c10::kCPU);
        }
        if (value.isGenerator()) return IValue();  // random numbers are the CPU's
        return value;
    }

    // Returns the given tensor for its twin, and a new tensor on the device for a new one.
    at::Tensor back(const at::Tensor& result) const {
        if (!result.defined()) return result;
        for (size_t i = 0; i < twins.size(); i++)
            if (twins[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return given[i];
        auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(*device));
        on_host(made).copy_(result);
        return made;
    }

    // An operator may give an output another size, and with it other memory.
    void resized() const {
        for (size_t i = 0; i < twins.size(); i++) {
            if (twins[i].sizes() == given[i].sizes() && twins[i].data_ptr() == given[i].data_ptr()) continue;
            given[i].resize_(twins[i].sizes());
            on_host(given[i]).copy_(twins[i]);
        }
    }
};

// A softmax from half precision to float in one kernel, which the CPU does not have.
bool converts(const std::string& name) { return name == "aten::_softmax" || name == "aten::_log_softmax"; }
bool converts_back(const std::string& name) {
    return name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data";
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto& schema = op.schema();
    Call call{.name = schema.name()};
    size_t first = stack->size() - schema.arguments().size();
    for (size_t i = first; i < stack->size(); i++) (*stack)[i] = call.argument((*stack)[i]);
    c10::optional<at::ScalarType> dtype;
    if (converts(schema.name()) && schema.overload_name().empty() && stack->back().toBool()) {
        (*stack)[first] = (*stack)[first].toTensor().to(at::kFloat);
        stack->back() = false;
    } else if (converts_back(schema.name()) && schema.overload_name().empty()) {
        dtype = stack->back().toScalarType();
        stack->back() = (*stack)[first].toTensor().scalar_type();
    }

    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

    call.resized();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
        auto& value = (*stack)[i];
        if (value.isTensor()) {
            value = call.back(dtype ? value.toTensor().to(*dtype) : value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (at::Tensor each : value.toTensorVector()) list.push_back(call.back(each));
            value = list;
        }
    }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
    if (self.numel()) on_host(self).copy_(on_host(from));
    return self;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
    if (from.sizes() != to.sizes()) to.resize_(from.sizes());
    on_host(to).copy_(on_host(from));
    return to;
}

bool returns_a_view(const c10::FunctionSchema& schema) {
    return std::any_of(schema.returns().begin(), schema.returns().end(),
                       [](const auto& each) { return each.alias_info() && !each.alias_info()->isWrite(); });
}

std::vector<c10::RegistrationHandleRAII> registrations;

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("copy_", copy_);
    m.impl("_copy_from_and_resize", copy_and_resize);
}

// Replaces the kernels, and returns their number.
extern "C" __attribute__((visibility("default"))) int use_cpu_kernels() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
        if (name.name.rfind("aten::", 0) || std::count(KEPT.begin(), KEPT.end(), name.name)) continue;
        auto op = dispatcher.findSchema(name);
        if (!op || returns_a_view(op->schema())) continue;
        if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
            !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
            continue;
        registrations.push_back(dispatcher.registerImpl(
            name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&compute>(), std::nullopt, nullptr,
            "pretended device"));
    }
    return registrations.size();
}
